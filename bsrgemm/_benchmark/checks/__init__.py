"""How far a result is from float64, worked out without bsrgemm."""
