"""A frame of a relay that was cut is refused, wherever it was cut inside an item."""

from __future__ import annotations

import pytest

from pdrun.rendezvous.protocol.codec import CodecError
from pdrun.rendezvous.transport.relay_frames import (
    MAGIC,
    AgentClosed,
    AgentFrame,
    AliveReport,
    RelayItem,
    RelayPulse,
    pack_frames,
    unpack_frame,
)

ITEMS: list[RelayItem] = [
    AgentFrame(1, "agent", b"data"),
    AliveReport(2, (3, 4)),
    AgentClosed(5),
    RelayPulse(6),
]


def test_each_cut_inside_an_item_is_refused() -> None:
    (frame,) = pack_frames(ITEMS)
    ends = [len(next(pack_frames(ITEMS[:count]))) for count in range(1, len(ITEMS))]
    for cut in range(len(MAGIC) + 1, len(frame)):
        if cut in ends:
            assert unpack_frame(frame[:cut]) == ITEMS[: ends.index(cut) + 1]
        else:
            with pytest.raises(CodecError, match="cut at"):
                unpack_frame(frame[:cut])
