"""Fourfold: 4-bit KV-cache pages inside an unmodified vLLM."""

__version__ = "0.1.0"
