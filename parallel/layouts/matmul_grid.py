"""
A matrix product over two and three axes (2D and 3D tensor parallel): its layouts.

    input     2D: (None, (x, y))      3D: ((z, y), x)       as the product before leaves it
    operand   2D: (None, x)           3D: (z, x)            gathered over y
    weight    2D: (x, y)              3D: ((x, z), y)       as [in, out]; 3D: gathered over z
    result    2D: (None, (y, x))      3D: ((z, x), y)       sums over x are reduce-scattered

The next product exchanges x and y.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdrun.parallel.layouts.layout import L


@dataclass(frozen=True)
class MatmulGrid:
    """
    The axes of a product (2D has no z), and the dim of the rows that 3D shards.
    """

    x: str
    y: str
    z: str | None = None
    rows: int = 0

    def operand(self, ndim: int) -> L:
        """Return the layout of the input that the product needs."""
        return self._spread(ndim, self._rows(), (self.x,))

    def result(self, ndim: int) -> L:
        """Return the layout of the result."""
        if self.z is None:
            return self._spread(ndim, (), (self.y, self.x))
        return self._spread(ndim, (self.z, self.x), (self.y,))

    def weight(self, is_transposed: bool, is_stored: bool) -> L:
        """
        Return the layout of the weight, as [in, out] or transposed, as it is stored or needed.
        """
        into = (self.x, *self._rows()) if is_stored else (self.x,)
        return L((self.y,), into) if is_transposed else L(into, (self.y,))

    def _rows(self) -> tuple[str, ...]:
        return () if self.z is None else (self.z,)

    def _spread(self, ndim: int, rows: tuple[str, ...], last: tuple[str, ...]) -> L:
        dims: list[tuple[str, ...]] = [() for _ in range(ndim)]
        dims[self.rows] = rows
        dims[-1] = last
        return L(*dims)


def match_matmul_grid(given: L, weight: L, is_transposed: bool) -> MatmulGrid | None:
    """
    Return the axes if the layouts of an input and a weight are those of a product over several.

    Args:
        is_transposed: the weight is [out, in].
    """
    if len(weight.dims) != 2 or len(given.dims) < 2 or given.sums or weight.sums:
        return None
    into, out = reversed(weight.dims) if is_transposed else weight.dims
    *rows, last = given.dims
    sharded = [dim for dim, axes in enumerate(rows) if axes]
    if len(out) != 1 or not into:
        return None
    if len(into) == 1 and not sharded and last == (into[0], out[0]):
        return MatmulGrid(into[0], out[0])
    is_3d = len(into) == 2 and len(sharded) == 1 and last == into[:1]
    if is_3d and rows[sharded[0]] == (into[1], out[0]):
        return MatmulGrid(into[0], out[0], into[1], sharded[0])
    return None
