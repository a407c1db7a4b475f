"""`/v1/messages`: the API of Anthropic, translated to and from the chats that Headway schedules."""
