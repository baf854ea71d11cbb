"""One module for each API: reads its bodies and writes its answers. Chats of other APIs are translated into `chat`."""
