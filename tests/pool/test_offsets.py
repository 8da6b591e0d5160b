from __future__ import annotations

import sys

from layerflow.pool.slots import ByOffset


def test_things_are_found_where_they_were_put_up_to_the_arenas_end():
    there: ByOffset[str] = ByOffset(1000)
    for offset in (999, 0, 500):
        there[offset] = str(offset)
    assert (len(there), there[999], dict(there.items())) == (3, "999", {0: "0", 500: "500", 999: "999"})
    assert (there.pop(500), there.pop(500), there.pop(1 << 40), len(there)) == ("500", None, None, 2)


def test_no_table_grows_with_all_things():
    there: ByOffset[None] = ByOffset(1 << 20)
    for offset in range(0, 1 << 20, 16):
        there[offset] = None
    whole = sys.getsizeof(dict.fromkeys(range(1 << 16)))
    assert max(map(sys.getsizeof, there._parts)) < whole / 20
