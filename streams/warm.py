"""`python -m streams.warm`: compiles every kernel ahead of time, by running the whole pipeline on a tiny simulated log.

numba keeps what it compiles beside the sources, so this costs half a minute once per checkout or image, and the first
batch of a role is as fast as the second.
"""

from __future__ import annotations

import logging


def main() -> None:
    from models.runtime import open_runtime
    from state.count_warm import warm_counts
    from state.warm import warm_up
    from streams.backtest import backtest
    from streams.settings import DEMO_BUNDLE
    from topics.id_lists import hash_list
    from topics.readers.jsonl import PAD
    from topics.readers.scan import scan
    from topics.simulator import preset, simulate

    logging.getLogger().setLevel(logging.WARNING)
    warm_up()
    warm_counts()
    scan(PAD)
    hash_list(b"[]")
    backtest(simulate(preset("tiny")), open_runtime(DEMO_BUNDLE))


if __name__ == "__main__":
    main()
