"""Equations of a traced program."""

from __future__ import annotations

import collections

import jax


def equations(jaxpr):
    """All equations, nested ones too, each with its enclosing primitives."""
    for equation in jaxpr.eqns:
        yield equation, ()
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                for nested, around in equations(inner):
                    yield nested, (equation.primitive.name, *around)


def count(jaxpr, primitive):
    """The number of equations of one primitive."""
    return sum(equation.primitive.name == primitive for equation, _ in equations(jaxpr))


def primitives(jaxpr, inside):
    """How many equations of each primitive are inside of equations of another; there are some."""
    names = [equation.primitive.name for equation, around in equations(jaxpr) if inside in around]
    assert names
    return collections.Counter(names)
