"""Small programs that the tests run."""
