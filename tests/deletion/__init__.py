"""The delete test: a part or a strategy whose file cannot be imported is missed by its own tests
alone.
"""
