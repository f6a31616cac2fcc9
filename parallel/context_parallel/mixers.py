"""
Modules that mix positions without attention: recurrent layers, convolutions along the sequence.

Each rank has a part of the sequence, so these would compute another model. They are refused by kind
before anything runs.
"""

from __future__ import annotations

import re

from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.context_parallel.sequences import API_NAME

RECURRENT_NAME = re.compile(
    r"Mamba|Rwkv|RWKV|RecurrentGemma|RgLru|RGLRU|GatedDelta|DeltaNet|xLSTM|LightningAttention"
    r"|LinearAttention|Retention|Hyena|S4D|MinimalRNN"
)
"""Class names of recurrences that are not torch's."""
CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d)


def check_mixers(model: nn.Module) -> None:
    """
    Refuse modules that mix positions without attention.

    Raises:
        UsageError: names the first one.
    """
    for name, module in model.named_modules():
        kind = type(module).__name__
        place = name or "the model"
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase)) or RECURRENT_NAME.search(kind):
            what = f"{place} ({kind}) is recurrent: a position depends on the state of the one"
            what += " before, which another rank has"
        elif isinstance(module, CONVOLUTIONS) and module.kernel_size[0] > 1:
            what = f"{place} ({kind}, kernel {module.kernel_size[0]}) is a convolution along the"
            what += " sequence, which needs positions of other ranks"
        else:
            continue
        raise UsageError(
            what,
            where=API_NAME,
            hint="use dp or tensor axes instead of cp; elsewhere=True accepts modules that compute"
            " on data which every rank has in full",
        )
