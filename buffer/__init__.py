if __name__ != "asyncrl.buffer":
    raise ImportError("import this package as asyncrl.buffer")
