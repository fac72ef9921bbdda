"""Code in C where torch is slow, compiled when there is a compiler and checked against torch before it is used."""
