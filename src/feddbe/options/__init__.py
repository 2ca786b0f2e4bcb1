"""What can be chosen: limits and meaning of an option, the table of a run's options, defaults, names."""

from feddbe.options.limits import Parameters, allowed, number_or_text, parameter

__all__ = ["Parameters", "allowed", "number_or_text", "parameter"]
