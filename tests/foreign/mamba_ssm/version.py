__version__ = "2.3.2.post1"
