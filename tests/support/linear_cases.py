"""Drawn inputs of the gated delta rule, and its recurrence in float64, token by token."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

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
    channels: bool = False,
    last: float = 1.0,
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
      channels: whether there is a decay per key channel.
      last: size of the last state's gradient. Those of a state's decays are small next to it, but
        for tokens that it forgets.
    """
    value_dim = head_dim if value_dim is None else value_dim

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(ml_dtypes.bfloat16).astype(np.float32)

    def unit(*shape: int) -> np.ndarray:
        x = rng.standard_normal(shape)
        x /= np.linalg.norm(x, axis=-1, keepdims=True)
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)

    gates = batch, length, heads
    decays = (*gates, head_dim) if channels else gates
    log_decay = (-decay * rng.random(decays)).astype(np.float32)
    beta = rng.random(gates).astype(np.float32)
    if edges:
        beta = np.select([rng.random(gates) < x for x in (0.1, 0.1, 0.1)], [0, 1, 2], beta)
        kinds = [rng.random(decays) < x for x in (0.1, 0.03)]
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
        last * normal(batch, heads, head_dim, value_dim),
        ids,
    )


def truth(case: Case) -> dict[str, np.ndarray]:
    """Output, last state and all gradients of the recurrence, token by token in float64."""
    return truth_and_terms(case)[0]


def truth_and_terms(case: Case) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """``truth``, and the sizes of what the gradients of beta and log decay sum over, by name.

    ``dbeta`` is a sum of a number per value column, ``[B, T, N, Hv]``. ``dlog_decay`` is one of a
    number per element of the state; of these the Euclidean norm is here, in its own shape. The
    rounding of a sum is relative to its terms, and terms can cancel: those of few tokens, or of a
    state that is not forgotten, whose sum then is nearly the same for thousands of tokens.
    NumPy, because XLA would compile it again for every shape.
    """
    run = _Recurrence(case)
    o, last = run.forward()
    gradients, terms = run.backward()
    return dict(zip(NAMES, (o, last, *gradients), strict=True)), terms


class _Step(NamedTuple):
    """A token of all sequences and heads, ``[B, N, ...]`` in float64.

    Attributes:
      q: query.
      k: key.
      decay: factor on the state's rows, ``[B, N, C, 1]``, C is 1 or H; 0 where a document begins, 1
        in padding.
      beta: 0 in padding.
      before: the state before it.
      missing: what the value has that the decayed state does not return for the key.
    """

    q: np.ndarray
    k: np.ndarray
    decay: np.ndarray
    beta: np.ndarray
    before: np.ndarray
    missing: np.ndarray

    @property
    def old(self) -> np.ndarray:
        """The decayed state."""
        return self.decay * self.before

    @property
    def after(self) -> np.ndarray:
        """The state after it."""
        return self.old + self.k[..., None] * (self.beta * self.missing)[..., None, :]


class _Recurrence:
    """The rule and its gradients; of the states only one in 32 is kept."""

    def __init__(self, case: Case) -> None:
        q, k, v, log_decay, beta, start = (np.asarray(x, np.float64) for x in case[:6])
        groups = v.shape[2] // k.shape[2]
        q, k = (np.repeat(x, groups, axis=2) for x in (q, k))
        self.channels = log_decay.ndim > beta.ndim
        do, decay = np.asarray(case.do, np.float64), np.exp(log_decay.reshape(*beta.shape, -1))
        if case.ids is not None:
            valid = case.valid[..., None]
            decay = np.where(case.begins[..., None, None], 0, decay)
            decay = np.where(valid[..., None], decay, 1)
            beta, do = np.where(valid, beta, 0), np.where(valid[..., None], do, 0)
        self.case, self.q, self.k, self.v, self.decay, self.beta = case, q, k, v, decay, beta
        self.do, self.kept, self.length = do, [start], v.shape[1]

    def steps(self, number: int) -> list[_Step]:
        """Those from the kept state of this number to the next one."""
        state, found = self.kept[number], []
        for t in range(32 * number, min(32 * number + 32, self.length)):
            q, k, b = self.q[:, t], self.k[:, t], self.beta[:, t, :, None]
            d = self.decay[:, t, :, :, None]
            missing = self.v[:, t] - np.einsum("bnk,bnkv->bnv", k, d * state)
            found.append(_Step(q, k, d, b, state, missing))
            state = found[-1].after
        return found

    def forward(self) -> tuple[np.ndarray, np.ndarray]:
        """The output and the last state."""
        o = []
        for number in range(-(-self.length // 32)):
            steps = self.steps(number)
            self.kept.append(steps[-1].after)
            o += [np.einsum("bnk,bnkv->bnv", step.q, step.after) for step in steps]
        result = self.case.scale * np.stack(o, 1)
        if self.case.ids is not None:
            result[~self.case.valid] = 0
        return result, self.kept[-1]

    def backward(self) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        """Gradients in the order of the inputs, and what some sum over."""
        case, (batch, length, heads, dim) = self.case, self.q.shape
        dq, dk = np.zeros((2, batch, length, heads, dim))
        dv, terms = np.zeros((2, *self.v.shape))
        dlog_decay, squares = np.zeros((2, batch, length, heads, dim))
        dstate, steps = np.asarray(case.dlast, np.float64), self.steps(0)
        for t in reversed(range(length)):
            if t % 32 == 31 or t == length - 1:
                steps = self.steps(t // 32)
            step, do = steps[t % 32], self.do[:, t]
            dq[:, t] = case.scale * np.einsum("bnkv,bnv->bnk", step.after, do)
            dstate = dstate + case.scale * step.q[..., None] * do[..., None, :]
            dchange = np.einsum("bnk,bnkv->bnv", step.k, dstate)
            terms[:, t] = dchange * step.missing
            dv[:, t] = step.beta * dchange
            dk[:, t] = np.einsum("bnkv,bnv->bnk", dstate, step.beta * step.missing)
            dk[:, t] -= np.einsum("bnkv,bnv->bnk", step.old, dv[:, t])
            dold = dstate - step.k[..., None] * dv[:, t, :, None, :]
            product = dold * step.old
            dlog_decay[:, t], squares[:, t] = product.sum(-1), (product**2).sum(-1)
            dstate = step.decay * dold
        if case.ids is not None:
            for x in (terms, dlog_decay, squares):
                x[~case.valid] = 0
        if not self.channels:
            dlog_decay, squares = dlog_decay.sum(-1), squares.sum(-1)
        grouped = batch, length, case.k.shape[2], -1, dim
        dq, dk = (x.reshape(grouped).sum(3) for x in (dq, dk))
        summed = {"dbeta": terms, "dlog_decay": np.sqrt(squares)}
        return [dq, dk, dv, dlog_decay, terms.sum(-1), dstate], summed


def error(got: Any, want: np.ndarray, terms: np.ndarray | None = None) -> float:
    """Relative error, Euclidean; of sums whose terms are larger, relative to these."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    sizes = [np.linalg.norm(x) for x in (want, terms) if x is not None]
    return float(np.linalg.norm(got - want) / max(*sizes, 1e-30))
