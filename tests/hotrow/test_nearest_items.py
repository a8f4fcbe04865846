"""The example of vectors in an index of nearest neighbours."""

import re
from pathlib import Path

import pytest

from tests.tools import warm

pytest.importorskip("usearch", reason="needs usearch, which no extra installs")
EXAMPLE = Path(__file__).parents[2] / "examples" / "nearest_items.py"


@pytest.mark.long
def test_the_index_finds_the_best_items_and_distances_do_not(tmp_path):
    done = warm.run(EXAMPLE, tmp_path)

    assert done.returncode == 0, done.stderr
    found = re.search(
        r"the index found (\d+) of the 10 best items\n(\d+) of them are among the 10 nearest", done.stdout
    )
    assert int(found[1]) >= 9
    assert int(found[2]) < 9
    assert done.stdout.count("of the user's taste") >= 5
