from hypothesis import settings

# A busy machine is no failure; a failure prints what reproduces it.
settings.register_profile("proto", deadline=None, print_blob=True, max_examples=60)
settings.load_profile("proto")
