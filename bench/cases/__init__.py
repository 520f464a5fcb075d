"""What is computed: each problem once, with its operands, its check and its peers."""
