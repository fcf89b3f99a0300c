// A place to drop a file on. Its bytes go to the kernel in pieces, one on the way at a time: a Jupyter server closes the
// connection at a message above 10 MiB.
const PIECE = 2 << 20;

function render({ model, el }) {
  const zone = document.createElement("label");
  const input = document.createElement("input");
  const words = document.createElement("span");
  zone.className = "hw-drop";
  input.type = "file";
  input.accept = model.get("accept");
  words.setAttribute("role", "status");
  const idle = `Drop ${model.get("label")} here, or choose`;
  words.textContent = model.widget_manager ? idle : `Dropping ${model.get("label")} needs a running notebook`;
  input.disabled = !model.widget_manager;
  zone.append(words, input);
  el.append(zone);

  let answer = () => {};
  const heard = (message) => answer(message);
  model.on("msg:custom", heard);
  let sending = false;

  async function send(file) {
    if (!file || sending) return;
    sending = input.disabled = true;
    try {
      for (let at = 0, first = true; first || at < file.size; at += PIECE, first = false) {
        const piece = await file.slice(at, at + PIECE).arrayBuffer();
        const replied = new Promise((resolve) => (answer = resolve));
        model.send({ at, size: file.size, name: file.name }, undefined, [piece]);
        words.textContent = `${file.name}: ${Math.round((100 * Math.min(at + PIECE, file.size)) / Math.max(file.size, 1))} %`;
        const { error } = await replied;
        if (error) throw new Error(error);
      }
      words.textContent = `${file.name} is read. ${idle}`;
    } catch (error) {
      words.textContent = `${file.name}: ${error.message}`;
    } finally {
      sending = input.disabled = false;
      input.value = "";
    }
  }

  const over = (event) => {
    event.preventDefault();
    event.stopPropagation();
    zone.classList.toggle("hw-over", event.type === "dragover");
  };
  for (const type of ["dragover", "dragleave"]) zone.addEventListener(type, over);
  zone.addEventListener("drop", (event) => {
    over(event);
    if (!input.disabled) send(event.dataTransfer.files[0]);
  });
  input.addEventListener("change", () => send(input.files[0]));
  return () => model.off("msg:custom", heard);
}

export default { render };
