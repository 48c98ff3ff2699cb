"""Ready-made tools for agents, for use in `Agent(tools=[...])`.

    calculator    arithmetic, exact                     calculator
    workspace     files in a folder, and nowhere else   *Workspace("notes", read_only=False).tools
    documents     search over a folder                  Documents("handbook").tool
    fetch         web pages of an allow-list            fetch_tool(allow=["docs.python.org"])
    sandbox       Python and shell, confined by the OS  see sandbox/__init__.py
    ask           a question to a human                 ask_human_tool()
    mcp_client    the tools of an MCP server            *McpTools(command=[...]).open().tools
    from_schema   anything described in JSON            tool_from_schema(name, about, schema, call)

In the other direction, mcp_server serves an agent to MCP clients: `cray-agents mcp agent.py`. Some
tools need more than the light core: `pip install 'cray-agents[tools]'`.
"""
