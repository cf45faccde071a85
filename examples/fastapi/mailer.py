# mailer.py
import bide

app = bide.Endpoint("mail", retry=bide.Retry(immediate=0, delays=["1s", "2s"]))


@app.handler
async def send(message: bide.Message) -> None:
    mail = message.json()
    if mail == {"receipt": 13}:
        raise ConnectionError("the mail server does not answer")
    print("sent", mail, flush=True)


app.serve()
