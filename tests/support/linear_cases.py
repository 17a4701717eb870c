"""Drawn inputs of the gated delta rule, and its recurrence in float64, token by token."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

NAMES = ("o", "last", "dq", "dk", "dv", "dlog_decay", "dbeta", "dstart")


class Case(NamedTuple):
    """Inputs, and gradients of the results; ``ids`` 0 is padding, None one document."""

    q: Any
    k: Any
    v: Any
    log_decay: Any
    beta: Any
    start: Any
    do: Any
    dlast: Any
    ids: Any = None

    @property
    def scale(self) -> float:
        """Of q k."""
        return self.q.shape[-1] ** -0.5

    @property
    def begins(self) -> Any:
        """Whether the state is reset before a token: where the id of the last valid one differs.

        The first document continues the first state.
        """
        begins = np.zeros(self.ids.shape, bool)
        for b, row in enumerate(self.ids):
            before = None
            for t, document in enumerate(row):
                if document > 0:
                    begins[b, t] = before is not None and before != document
                    before = document
        return begins

    @property
    def valid(self) -> Any:
        """Whether a token is no padding."""
        return self.ids > 0


def zeros_in_padding(case: Case) -> Case:
    """The case with zeros in padding, which implementations may rely on."""
    if case.ids is None:
        return case
    names = ("q", "k", "v", "log_decay", "beta", "do")
    arrays = {name: np.array(getattr(case, name)) for name in names}
    for x in arrays.values():
        x[~case.valid] = 0
    return case._replace(**arrays)


def draw(
    rng: np.random.Generator,
    length: int,
    *,
    batch: int = 1,
    heads: int = 2,
    key_heads: int = 1,
    head_dim: int = 128,
    value_dim: int | None = None,
    decay: float = 0.1,
    documents: int = 0,
    edges: bool = False,
) -> Case:
    """A case in float32 that bfloat16 holds exactly, apart from gates and states.

    Args:
      rng: random numbers.
      length: T.
      batch: B.
      heads: N.
      key_heads: K.
      head_dim: H.
      value_dim: Hv; None is H.
      decay: largest decrease of a log decay.
      documents: number of documents, with padding in and between them; 0 without ids.
      edges: some betas of 0, 1 and 2, some log decays of 0 and -1000.
    """
    value_dim = head_dim if value_dim is None else value_dim

    def normal(*shape: int) -> np.ndarray:
        return np.asarray(jnp.asarray(rng.standard_normal(shape), jnp.bfloat16), np.float32)

    def unit(*shape: int) -> np.ndarray:
        x = rng.standard_normal(shape)
        x /= np.linalg.norm(x, axis=-1, keepdims=True)
        return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)

    gates = batch, length, heads
    log_decay = (-decay * rng.random(gates)).astype(np.float32)
    beta = rng.random(gates).astype(np.float32)
    if edges:
        beta = np.select([rng.random(gates) < x for x in (0.1, 0.1, 0.1)], [0, 1, 2], beta)
        kinds = [rng.random(gates) < x for x in (0.1, 0.03)]
        log_decay = np.select(kinds, [0, -1000], log_decay).astype(np.float32)
        beta = beta.astype(np.float32)
    ids = None
    if documents:
        ends = np.sort(rng.integers(0, length + 1, (batch, documents - 1)), axis=1)
        ids = 1 + (np.arange(length)[None, :, None] >= ends[:, None, :]).sum(-1)
        ids = np.where(rng.random((batch, length)) < 0.1, 0, ids).astype(np.int32)
    return Case(
        unit(batch, length, key_heads, head_dim),
        unit(batch, length, key_heads, head_dim),
        normal(batch, length, heads, value_dim),
        log_decay,
        beta,
        normal(batch, heads, head_dim, value_dim),
        normal(batch, length, heads, value_dim),
        normal(batch, heads, head_dim, value_dim),
        ids,
    )


def truth(case: Case) -> dict[str, np.ndarray]:
    """Output, last state and all gradients, by autodiff of the recurrence in float64."""
    return truth_and_terms(case)[0]


def truth_and_terms(case: Case) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """``truth``, and what beta's gradient sums over: a number per column, ``[B, T, N, Hv]``.

    The rounding of a sum is relative to its terms, and few tokens can have terms that cancel.
    """
    with jax.enable_x64(True):
        arrays = [jnp.asarray(x, jnp.float64) for x in case[:8]]
        if case.ids is None:
            shape = case.v.shape[:2]
            begins, valid = jnp.zeros(shape, bool), jnp.ones(shape, bool)
        else:
            begins, valid = jnp.asarray(case.begins), jnp.asarray(case.valid)

        def run(q, k, v, log_decay, beta, start):
            return _recurrence(q, k, v, log_decay, beta, start, begins, valid, case.scale)

        # A beta for each column: its gradient's terms.
        arrays[4] = jnp.broadcast_to(arrays[4][..., None], case.v.shape)
        results, vjp = jax.vjp(run, *arrays[:6])
        gradients = vjp((arrays[6], arrays[7]))
        found = dict(zip(NAMES, map(np.asarray, (*results, *gradients)), strict=True))
        terms = found["dbeta"]
        return found | {"dbeta": terms.sum(-1)}, terms


def _recurrence(q, k, v, log_decay, beta, start, begins, valid, scale):
    groups = v.shape[2] // k.shape[2]
    q, k = (jnp.repeat(x, groups, axis=2) for x in (q, k))

    @jax.checkpoint  # Of each token the state alone is kept.
    def step(state, token):
        q, k, v, log_decay, beta, begins, valid = token
        decay = jnp.where(begins[:, None], 0, jnp.exp(log_decay))[..., None, None]
        old = decay * state
        change = beta * (v - jnp.einsum("bnk,bnkv->bnv", k, old))
        new = old + k[..., None] * change[..., None, :]
        new = jnp.where(valid[:, None, None, None], new, state)
        o = jnp.where(valid[:, None, None], scale * jnp.einsum("bnk,bnkv->bnv", q, new), 0)
        return new, o

    tokens = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, log_decay, beta, begins, valid)]
    last, o = lax.scan(step, start, tuple(tokens))
    return jnp.moveaxis(o, 0, 1), last


def error(got: Any, want: np.ndarray, terms: np.ndarray | None = None) -> float:
    """Relative error, Euclidean; of sums whose terms are larger, relative to these."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    sizes = [np.linalg.norm(x) for x in (want, terms) if x is not None]
    return float(np.linalg.norm(got - want) / max(*sizes, 1e-30))
