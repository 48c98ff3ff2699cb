/** Dashboard: the pages of a platform, a client of the gateway's HTTP API and of nothing else. */
import { render } from "preact";
import { App } from "./app";
import { screens } from "./lib/screen_list";
import "./lib/theme";
import { SCREENS } from "./screens";
import "./style.css";

screens.value = SCREENS;
render(<App />, document.getElementById("app")!);
