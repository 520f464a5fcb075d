"""Systems of linear elasticity, and conjugate gradients with a multigrid cycle, generic over the matrices."""
