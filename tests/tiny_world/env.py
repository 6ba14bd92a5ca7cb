"""A kitchen timer: about the smallest world that plugs in. spec: {"minutes": int} to be set, or {"max_letters": int} for a reply."""
from common import Grade, calls_match, parse_tool_calls

TOOLS = [{"type": "function", "function": {"name": "set_timer", "description": "Starts the kitchen timer.", "parameters": {
    "type": "object", "properties": {"minutes": {"type": "integer"}}, "required": ["minutes"]}}}]


class Env:
    def reset(self, task):
        self.spec, self.text = task["spec"], ""
        return task["messages"], task["tools"]

    def step(self, message):
        """Runs the message's calls; returns the new messages and whether the turn is over."""
        self.text = message["content"]
        status, calls = parse_tool_calls(self.text)
        results = [f"timer set to {call['arguments'].get('minutes')} min" for call in calls]
        return [{"role": "tool", "content": result} for result in results], not results

    def grade(self):
        status, calls = parse_tool_calls(self.text)
        if status == "malformed":
            return Grade(0.0, "malformed", "The call is not valid JSON in <tool_call> tags.")
        if "max_letters" in self.spec:
            short = status == "no_call" and 0 < len(self.text) <= self.spec["max_letters"]
            return Grade(float(short), "intended" if short else "substituted", f"A reply has 1 to {self.spec['max_letters']} letters.")
        if not calls:
            return Grade(0.0, "abandoned", "No timer was set.")
        wanted = [{"name": "set_timer", "arguments": {"minutes": self.spec["minutes"]}}]
        right = calls_match(wanted, calls, {"minutes": "integer"})
        return Grade(float(right), "intended", "Done." if right else "The timer is wrong.")
