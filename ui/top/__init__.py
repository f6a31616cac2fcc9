"""
`pdrun top`: one job on a full screen.

    model.py    what the screen shows, without a terminal
    app.py      the screen (textual, the extra `screen`)

May import: pdrun floor 0. Start reading in `model`.
"""
