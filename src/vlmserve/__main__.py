from vlmserve.cli import app

app(prog_name="vlmserve")
