"""What is measured, section by section: operands, the call of bsrgemm, the calls of its peers, one line for each."""
