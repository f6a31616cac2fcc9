"""The models of timm, torchvision, diffusers and peft in `model_zoo.py`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from zoo_models import (
    CLASSES,
    IMAGE_PIXELS,
    Architecture,
    StylesOf,
    class_loss,
    image_batch,
    make_generator,
    own_loss,
    picture_loss,
    text_batch,
)
from zoo_transformers import DECODERS, build_transformers

# ---- timm and torchvision ---------------------------------------------------


def _timm_model(name: str, **options: Any) -> nn.Module:
    import timm

    model = timm.create_model(name, num_classes=CLASSES, pretrained=False, **options)
    assert isinstance(model, nn.Module)
    return model


def _torchvision_model(name: str, **options: Any) -> nn.Module:
    import torchvision

    model = getattr(torchvision.models, name)(num_classes=CLASSES, **options)
    assert isinstance(model, nn.Module)
    return model


def _timm_vit_styles(model: nn.Module) -> Any:
    from pdrun import Strategy, col, heads, row

    return Strategy(
        {
            "blocks.*.attn": heads("tp"),
            "blocks.*.attn.qkv": col("tp", blocks=3),
            "blocks.*.mlp.fc1": col("tp"),
            "blocks.*.attn.proj|blocks.*.mlp.fc2": row("tp"),
        }
    )


def _torchvision_vit_styles(model: nn.Module) -> Any:
    from pdrun import Strategy, col, heads, row

    return Strategy(
        {
            "encoder.layers.*.self_attention": heads("tp"),
            "encoder.layers.*.mlp.0": col("tp"),
            "encoder.layers.*.mlp.3": row("tp"),
        }
    )


def image_models() -> list[Architecture]:
    """Return classifiers of timm and torchvision."""
    small = {"img_size": IMAGE_PIXELS, "patch_size": 8, "embed_dim": 32, "depth": 2}
    timm_models: list[tuple[str, str, dict[str, Any], StylesOf | None, bool]] = [
        ("vit", "vit_tiny_patch16_224", {**small, "num_heads": 4}, _timm_vit_styles, False),
        ("deit3", "deit3_small_patch16_224", {**small, "num_heads": 4}, _timm_vit_styles, False),
        (
            "swin_t",
            "swin_tiny_patch4_window7_224",
            {
                "img_size": IMAGE_PIXELS,
                "window_size": 4,
                "embed_dim": 16,
                "depths": (2, 2),
                "num_heads": (2, 4),
                "drop_path_rate": 0.0,
            },
            None,
            False,
        ),
        ("resnet", "resnet10t", {}, None, True),
        (
            "convnext_t",
            "convnext_atto",
            {"dims": (8, 16, 16, 32), "depths": (1, 1, 2, 1)},
            None,
            False,
        ),
        ("efficientnet", "efficientnet_lite0", {}, None, True),
    ]
    vit = {
        "image_size": IMAGE_PIXELS,
        "patch_size": 8,
        "num_layers": 2,
        "num_heads": 4,
        "hidden_dim": 32,
        "mlp_dim": 48,
    }
    vision_models: list[tuple[str, str, dict[str, Any], StylesOf | None, bool]] = [
        ("tv_vit", "VisionTransformer", vit, _torchvision_vit_styles, False),
        ("tv_resnet18", "resnet18", {}, None, True),
        ("tv_mobilenet", "mobilenet_v2", {"width_mult": 0.25, "dropout": 0.0}, None, True),
        ("tv_shufflenet", "shufflenet_v2_x0_5", {}, None, True),
        (
            "tv_swin",
            "SwinTransformer",
            {
                "patch_size": [4, 4],
                "embed_dim": 16,
                "depths": [2, 2],
                "num_heads": [2, 4],
                "window_size": [4, 4],
                "stochastic_depth_prob": 0.0,
            },
            None,
            False,
        ),
    ]
    found = []
    for library, make, table in (
        ("timm", _timm_model, timm_models),
        ("torchvision", _torchvision_model, vision_models),
    ):
        for name, kind, options, styles, is_normalised in table:
            traits = frozenset(("batchnorm",)) if is_normalised else frozenset()
            found.append(
                Architecture(
                    name if name.startswith("tv_") else f"timm_{name}",
                    library,
                    functools.partial(make, kind, **options),
                    image_batch,
                    class_loss,
                    styles=styles,
                    traits=traits,
                )
            )
    return found


# ---- diffusers and peft -----------------------------------------------------


def _noise_batch(rows: int, step: int) -> dict[str, torch.Tensor]:
    generator = make_generator(step)
    return {
        "sample": torch.randn(rows, 4, 16, 16, generator=generator),
        "timestep": torch.randint(0, 100, (rows,), generator=generator),
        "class_labels": torch.randint(CLASSES, (rows,), generator=generator),
        "target": torch.randn(rows, 4, 16, 16, generator=generator),
    }


def _unet() -> nn.Module:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=4,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    assert isinstance(model, nn.Module)
    return model


def _dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        sample_size=16,
        in_channels=4,
        num_layers=2,
        num_attention_heads=4,
        attention_head_dim=8,
        patch_size=4,
        num_embeds_ada_norm=CLASSES + 100,
        norm_num_groups=4,
    )
    assert isinstance(model, nn.Module)
    for module in model.modules():
        if getattr(module, "dropout_prob", 0.0):
            module.dropout_prob = 0.0  # of the class labels
    return model


def _lora(kind: str, targets: list[str]) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = build_transformers("AutoModelForCausalLM", kind, DECODERS[kind])
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    found = get_peft_model(model, config)
    assert isinstance(found, nn.Module)
    return found


def adapted_models() -> list[Architecture]:
    """Return models of diffusers and of peft."""
    found = []
    for name, make in (("unet", _unet), ("dit", _dit)):
        found.append(
            Architecture(
                f"diffusers_{name}",
                "diffusers",
                make,
                _noise_batch,
                picture_loss,
                forward=(
                    (lambda model, batch: model(batch["sample"], batch["timestep"]))
                    if name == "unet"
                    else (
                        lambda model, batch: model(
                            batch["sample"], batch["timestep"], batch["class_labels"]
                        )
                    )
                ),
            )
        )
    for kind, targets in (("llama", ["q_proj", "v_proj"]), ("gpt2", ["c_attn"])):
        found.append(
            Architecture(
                f"lora_{kind}",
                "peft",
                functools.partial(_lora, kind, targets),
                text_batch,
                own_loss,
                traits=frozenset(("transformers",)),
            )
        )
    return found
