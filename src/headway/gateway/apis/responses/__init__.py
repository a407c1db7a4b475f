"""`/v1/responses`: the Responses API, translated to and from the chats that Headway schedules."""
