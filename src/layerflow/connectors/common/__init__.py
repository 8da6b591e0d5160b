"""What connectors of all engines share: guarded hooks, checked interfaces, weights, what a model computes with."""
