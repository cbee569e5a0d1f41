"""Topics for logs whose items have no category: clusters of items that the same users touch.

Items are placed by the leading singular vectors of the user-item matrix (histories and clicks, both sides scaled to
1/sqrt(count)), without the first one, which only says how popular an item is; then clustered by cosine. The result is a
table by hashed item id that goes into the `fm_item` graph. An item that too few users touched has topic 0: unknown.
"""

from __future__ import annotations

import numpy as np
import torch

from models.api import F32, I64, U64, PairBatch
from state.clusters import cluster
from state.profiles import Profiles, unit

BUCKETS = 1 << 16
CLUSTERS = 30
DIMENSIONS = 16
LEAST_USERS = 2
ITERATIONS = 8


def topic_table(batch: PairBatch, clicked: F32, seed: int = 0) -> I64 | None:
    """[BUCKETS + 1] topic of each item bucket, 1 .. CLUSTERS, 0 unknown; None when the requests tell nothing of topics.

    clicked [N] belongs to the batch's pairs.
    """
    of_pair = np.repeat(batch.users, np.diff(batch.splits))
    of_past = np.repeat(batch.users, np.diff(batch.history_splits))
    hit = clicked > 0
    touched = np.stack([np.concatenate([of_past, of_pair[hit]]), np.concatenate([batch.history, batch.items[hit]])])
    users, items = np.unique(touched, axis=1)  # a user counts once for an item
    known, item, count = np.unique(items, return_inverse=True, return_counts=True)
    often = count >= LEAST_USERS
    if int(often.sum()) <= CLUSTERS:
        return None
    keep = often[item]
    _, user = np.unique(users[keep], return_inverse=True)
    dense = np.cumsum(often) - 1
    vectors = _places(user, dense[item[keep]], seed)
    topics = _clusters(known[often], vectors, seed)
    table = np.zeros(BUCKETS + 1, np.int64)
    order = np.argsort(count[often], kind="stable")  # of two items of one bucket the one touched more stays
    table[(1 + known[often] % np.uint64(BUCKETS)).astype(np.int64)[order]] = topics[order]
    return table


def _places(user: I64, item: I64, seed: int) -> F32:
    """[items, DIMENSIONS] by subspace iteration; one row and column index per touch."""
    shape = int(user.max()) + 1, int(item.max()) + 1
    scale = 1 / np.sqrt(np.bincount(user, minlength=shape[0])[user] * np.bincount(item, minlength=shape[1])[item])
    matrix = torch.sparse_coo_tensor(
        torch.from_numpy(np.stack([user, item])), torch.from_numpy(scale), shape, check_invariants=True
    )
    generator = torch.Generator().manual_seed(seed)
    width = min(DIMENSIONS + 9, *shape)
    basis = torch.randn(shape[1], width, generator=generator, dtype=torch.float64)
    for _ in range(ITERATIONS):
        basis, _ = torch.linalg.qr(torch.sparse.mm(matrix.t(), torch.sparse.mm(matrix, basis)))
    _, _, axes = torch.linalg.svd(torch.sparse.mm(matrix, basis), full_matrices=False)
    places: F32 = (basis @ axes.T)[:, 1 : DIMENSIONS + 1].numpy().astype(np.float32)
    return places


def _clusters(items: U64, vectors: F32, seed: int) -> I64:
    """[items] 1 .. CLUSTERS."""
    directions, _ = unit(vectors)
    n = len(items)
    data = Profiles(items, directions, np.zeros((n, 1), np.float32), np.zeros(n, np.int64), 0)
    centroids = cluster(data, CLUSTERS, model=0, window_ms=0, seed=seed).centroids
    topics: I64 = 1 + (directions @ centroids.T).argmax(axis=1)
    return topics
