"""Write generated samples in Criteo's raw form, for ``hotrow train --data FILE``.

Run: python examples/write_criteo_file.py FILE ROWS [SEED]
"""

import sys
from pathlib import Path

from training.data.criteo import write_lines
from training.synthetic.criteo_like import generate_blocks

path, rows = Path(sys.argv[1]), int(sys.argv[2])
seed = int(sys.argv[3]) if len(sys.argv) > 3 else 0

with path.open("w", encoding="utf-8") as file:
    for block in generate_blocks(rows, seed):
        write_lines(file, block.samples, block.counts)
print(f"{rows:,} samples written to {path}: hotrow train --data {path} --output models")
