"""What every configuration refuses values with."""


def one_of(field: str, value, choices):
    """Raises ValueError when a field is none of its choices."""
    if value not in choices:
        raise ValueError(f"{field}={value!r}: choose from {', '.join(choices)}")


def at_least(low, group: str, cfg, *fields: str):
    """Raises ValueError when one of a config's fields is not at least `low`."""
    for field in fields:
        value = getattr(cfg, field)
        if not value >= low:
            raise ValueError(f"{group}.{field}={value} must be at least {low}")
