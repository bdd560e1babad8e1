"""The quantiser: transform (centre, balance, rotate), 4-bit codec, calibration statistics and files."""
