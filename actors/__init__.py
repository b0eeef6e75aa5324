if __name__ != "asyncrl.actors":
    raise ImportError("import this package as asyncrl.actors")
