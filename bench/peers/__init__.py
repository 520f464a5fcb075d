"""Other libraries: each function prepares one problem and returns the call to be timed."""
