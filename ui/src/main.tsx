/** Dashboard: the pages of a platform, a client of the gateway's HTTP API and of nothing else. */
import { render } from "preact";
import { App } from "./app";
import "./lib/theme";
import "./style.css";

render(<App />, document.getElementById("app")!);
