"""What tests of translated YAML files share."""

import copy

import yaml


def but(base: dict, text: str) -> dict:
    """Returns nested dictionaries with lines `a.b: value` put in; null takes one out."""
    out = copy.deepcopy(base)
    for line in filter(str.strip, text.split("\n")):
        key, value = line.strip().split(": ", 1)
        node, (*groups, name) = out, key.split(".")
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = yaml.safe_load(value)
        if node[name] is None:
            del node[name]
    return out
