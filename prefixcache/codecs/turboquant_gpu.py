def available():
    return False


def takes(form):
    return False


def describe():
    return "not there"
