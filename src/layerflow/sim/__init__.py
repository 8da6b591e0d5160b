"""The production core, pool and window under a virtual clock: what another configuration would have done with a trace.

What runs is layerflow's own: :class:`layerflow.flow.Flow`, :class:`layerflow.pool.memory.MemoryPool`, the search for a
hit, the choice between layerwise, bulk and recompute, and the window of a load lane. Models stand for what a machine
does: links, compute, and an engine that batches continuously.
"""
