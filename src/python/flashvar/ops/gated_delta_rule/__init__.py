"""The gated delta rule, linear attention with a state that forgets and overwrites."""
