"""The thin engine: what a language model needs around the kernels to answer a request."""
