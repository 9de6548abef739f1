"""Dataclasses of arrays that JAX takes apart: what flax.struct is, without flax.

Importing flax took a sixth of the package's start, and nothing else of it is used.
"""

import dataclasses

import jax

# A field that is no array, and by which programs are compiled.
static = {"static": True}


def dataclass(cls: type) -> type:
    """Makes a class a frozen dataclass and a tree of its fields, with `x.replace(a=...)`."""
    cls = dataclasses.dataclass(frozen=True)(cls)
    cls.replace = dataclasses.replace
    return jax.tree_util.register_dataclass(cls)
