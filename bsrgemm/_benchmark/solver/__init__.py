"""Linear elasticity solved by conjugate gradients with a multigrid cycle."""
