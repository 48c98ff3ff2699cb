/** Entry of the viewer in a file of runs, as `cray-agents export --format html` writes it. */
import { render } from "preact";
import { answerFrom } from "../lib/api";
import { screens } from "../lib/screen_list";
import "../lib/theme";
import "../style.css";
import { answerFromFile } from "./file_answers";
import { Viewer } from "./viewer";

answerFrom(answerFromFile);
screens.value = [{ name: "run", title: "Run", role: "use", menu: false, load: () => Promise.reject(new Error()) }];
const app = document.getElementById("app")!;
app.textContent = "";
render(<Viewer />, app);
