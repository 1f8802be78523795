"""The op causal_conv1d: depthwise causal convolution of short width over sequences."""
