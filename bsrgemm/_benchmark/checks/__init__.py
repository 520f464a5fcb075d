"""How far a result is from float64, computed without bsrgemm."""
