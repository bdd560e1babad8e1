"""Policy simulator: a discrete-event model of the engine that drives the real scheduling policy."""
