"""RoPE in ``config.json``, in the formats of transformers before and since version 5.

    before 5    "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, ...}
    since 5     "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": ...}

``rope_parameters`` may have one such dictionary per type of layer. Before version 5, sliding
layers may have their own base, ``"rope_local_base_freq"``, and ``rope_scaling`` is then that of
full layers. A file may have both formats if they agree.

Families whose models rotate part of a head have ``"partial_rotary_factor"``, in either place; those
with models without RoPE have a ``"rope_theta"`` that may be null.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from burst_jax.errors import check_integer, check_positive, first_of, shown
from burst_jax.layers.rope import DynamicRope, LinearRope, Llama3Rope, Rope, YarnRope
from burst_jax.models.hf.fields import ignoring

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
_FRACTION = "partial_rotary_factor"

_OLD_LENGTH = "original_max_position_embeddings"
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", _OLD_LENGTH)
_YARN = ("factor", _OLD_LENGTH, "beta_fast", "beta_slow", "attention_factor")
# Each type's class, and its options in config.json.
_TYPES: dict[str, tuple[type[Rope], tuple[str, ...]]] = {
    "default": (Rope, ()),
    "linear": (LinearRope, ("factor",)),
    "dynamic": (DynamicRope, ("factor",)),
    "llama3": (Llama3Rope, _LLAMA3),
    "yarn": (YarnRope, (*_YARN, "mscale", "mscale_all_dim", "truncate")),
}


class RopeForms(NamedTuple):
    """What a family's RoPE may be besides that of all head features.

    Attributes:
      partial: whether it may be of part of them.
      absent: whether layers may have none, where the base is null.
      ignored: options that do not change the angles of text.
      none: whether no layer has one, so that its keys are not read.
    """

    partial: bool = False
    absent: bool = False
    ignored: Collection[str] = ()
    none: bool = False


def read_ropes(
    values: Mapping[str, Any], thetas: Mapping[str, float], forms: RopeForms
) -> dict[str, Rope]:
    """The RoPE of full and of sliding layers of a ``config.json`` with the family's defaults.

    ``thetas`` has the base of each type of layer where ``config.json`` has none.

    Raises:
      NotImplementedError: an unsupported type of RoPE, or option of one.
      ValueError: an option is missing; ``rope_scaling`` and ``rope_parameters`` disagree; one of
        them has the other's form.
    """
    if forms.none:
        return dict.fromkeys((FULL, SLIDING), Rope(fraction=0.0))
    scaling, parameters = (_object(values, key) for key in ("rope_scaling", "rope_parameters"))
    scaling, parameters = (without_keys(given, forms.ignored) for given in (scaling, parameters))
    bases = {kind: _base(values, kind, thetas, forms) for kind in (FULL, SLIDING)}
    per_type = "rope_local_base_freq" in values
    if per_type and (FULL in scaling or SLIDING in scaling):
        raise ValueError(
            f"config.json's rope_scaling is {shown(scaling)}: a dictionary for each type of layer "
            "must be in rope_parameters"
        )
    if per_type and parameters and FULL not in parameters and SLIDING not in parameters:
        raise ValueError(
            f"config.json's rope_parameters is {shown(parameters)}: it must have a dictionary for "
            f"each type of layer, {FULL} and {SLIDING}"
        )
    old = {kind: {} if per_type and kind == SLIDING else scaling for kind in bases}
    nested = FULL in parameters or SLIDING in parameters
    new = {kind: _object(parameters, kind) if nested else parameters for kind in bases}
    readings = [
        {kind: _rope(key, own[kind], values, base, forms) for kind, base in bases.items()}
        for key, own, given in (
            ("rope_scaling", old, scaling),
            ("rope_parameters", new, parameters),
        )
        if given or own is new
    ]
    # Which of them transformers reads depends on its version and on the model.
    if scaling and parameters and readings[0] != readings[1]:
        raise ValueError(
            f"config.json has rope_scaling {shown(scaling)} and rope_parameters "
            f"{shown(parameters)}, which disagree, {readings[0]} and {readings[1]}: remove one of "
            "them"
        )
    return readings[0]


def without_options(values: Mapping[str, Any], ignore: Collection[str]) -> dict[str, Any]:
    """``config.json`` without the options ``ignore`` of its RoPE."""
    keys = ("rope_scaling", "rope_parameters")
    return {
        key: without_keys(value, ignore) if key in keys else value for key, value in values.items()
    }


def without_keys(given: Any, ignore: Collection[str]) -> Any:
    """A JSON object, and those in it, without some keys."""
    if not isinstance(given, Mapping):
        return given
    return {key: without_keys(value, ignore) for key, value in given.items() if key not in ignore}


def _base(
    values: Mapping[str, Any], kind: str, thetas: Mapping[str, float], forms: RopeForms
) -> float | None:
    """The base of a type of layer without one in its dictionary; None is no RoPE."""
    local = kind == SLIDING and "rope_local_base_freq" in values
    theta = values.get("rope_local_base_freq" if local else "rope_theta")
    return thetas[kind] if theta is None and not forms.absent else theta


def _rope(
    source: str,
    given: Mapping[str, Any],
    values: Mapping[str, Any],
    theta: float | None,
    forms: RopeForms,
) -> Rope:
    """One RoPE from its dictionary, the key ``source``, and for options it lacks from others."""
    source = f"config.json's {source}"
    if forms.absent and given.get("rope_theta", theta) is None:
        return Rope(fraction=0.0)
    options = {key: value for key, value in given.items() if value is not None}
    old_name = options.pop("type", "default")
    name = options.pop("rope_type", old_name)
    for key in ("mscale", "mscale_all_dim"):
        # transformers treats YaRN's 0 as absent.
        if name == "yarn" and options.get(key) == 0:
            del options[key]
    theta = check_positive("rope_theta", options.pop("rope_theta", theta))
    if not isinstance(name, str) or name not in _TYPES:
        raise NotImplementedError(
            f"{source} has rope_type {shown(name)}: supported are {', '.join(_TYPES)}"
        )
    rope, known = _TYPES[name]
    positions = values["max_position_embeddings"]
    if _OLD_LENGTH in known:
        options.setdefault(_OLD_LENGTH, values.get(_OLD_LENGTH) or positions)
    else:
        # transformers ignores the old length for these.
        options.pop(_OLD_LENGTH, None)
    for key in set(known) & set(options):
        if key == _OLD_LENGTH:
            check_integer(f"{source}'s {key}", options[key], 1, 2**31 - 1)
        elif key == "truncate":
            if not isinstance(options[key], bool):
                raise ValueError(
                    f"{source} has truncate {shown(options[key])}: it must be true or false"
                )
        else:
            check_positive(f"{source}'s {key}", options[key])
    if name == "yarn" and "factor" not in options:
        options["factor"] = positions / options[_OLD_LENGTH]
    fraction = options.pop(_FRACTION, values.get(_FRACTION) or 1.0)
    if fraction != 1 and not forms.partial:
        raise NotImplementedError(
            f"{_FRACTION} is {shown(fraction)}: only 1 is supported, RoPE of all head features"
        )
    if not 0 < check_positive(f"{source}'s {_FRACTION}", fraction) <= 1:
        raise ValueError(f"{source} has {_FRACTION} {shown(fraction)}: it must be at most 1")
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise NotImplementedError(
            f"{source} with rope_type {name!r} has {first_of(unknown)}: known options are "
            f"{', '.join(known) or 'none'}. If one does not change the computation, "
            f"{ignoring(unknown)}"
        )
    needed = {"factor", "low_freq_factor", "high_freq_factor"}.intersection(known)
    if missing := sorted(needed - set(options)):
        raise ValueError(f"{source} with rope_type {name!r} lacks {', '.join(missing)}")
    if rope is DynamicRope:
        return DynamicRope(theta, float(options["factor"]), int(positions), fraction=fraction)
    fields = {_field(key): value for key, value in options.items()}
    return rope(theta=theta, fraction=fraction, **fields)


def write_ropes(ropes: Mapping[str, Rope], forms: RopeForms, *, per_type: bool) -> dict[str, Any]:
    """The keys of ``config.json`` that :func:`read_ropes` reads as these RoPEs by type of layer.

    Both formats, for any version of transformers; only the new one where the old one cannot express
    them, as it has no more than a base for sliding layers. ``per_type`` is whether the family has a
    RoPE per type of layer.
    """
    if forms.none:
        return {}
    new = {kind: _rope_json(rope) for kind, rope in ropes.items()}
    if forms.partial:
        for kind, rope in ropes.items():
            new[kind][_FRACTION] = rope.fraction
    if not per_type:
        # If they differ, reading this gives another config, and the family is not the decoder's.
        first = next(iter(new.values()))
        return {"rope_parameters": first, **_old_json(first)}
    old: dict[str, Any] = {}
    sliding = ropes.get(SLIDING)
    if FULL in ropes and (sliding is None or type(sliding) is Rope):
        old = _old_json(new[FULL])
        if sliding is not None:
            old["rope_local_base_freq"] = sliding.theta
    return {"rope_parameters": new, **old}


def _rope_json(rope: Rope) -> dict[str, Any]:
    if rope == Rope(fraction=0.0):
        return {"rope_type": "default", "rope_theta": None}
    for name, (kind, known) in _TYPES.items():
        if type(rope) is kind:
            options = {key: getattr(rope, _field(key)) for key in known}
            options = {key: value for key, value in options.items() if value is not None}
            return {"rope_type": name, "rope_theta": rope.theta, **options}
    raise NotImplementedError(f"rope is {rope}: transformers has no such RoPE")


def _field(key: str) -> str:
    """The field of a RoPE that is this option."""
    return "old_positions" if key == _OLD_LENGTH else key


def _old_json(new: Mapping[str, Any]) -> dict[str, Any]:
    """The format before transformers 5."""
    outer = {key: new[key] for key in ("rope_theta", _FRACTION) if key in new}
    options = {key: value for key, value in new.items() if key not in outer}
    return outer | ({} if new["rope_type"] == "default" else {"rope_scaling": options})


def _object(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The dictionary at a key; empty where it is null or missing."""
    given = values.get(key)
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"config.json's {key} is {shown(given)}: it must be a JSON object")
    return given or {}
