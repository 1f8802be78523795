"""The ops in Triton: no binary needed, compiled for the device at the first call."""
