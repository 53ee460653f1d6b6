"""A shop for people: build its catalogue, shop in it, look at what agents did in it."""
