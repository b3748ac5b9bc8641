"use strict";
const find = (id) => document.getElementById(id);
const messages = [];
let writing = null; // what stops the answer under way
let before = null; // what the stages had counted a moment ago

function headers(more = {}) {
  const key = sessionStorage.getItem("key");
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function call(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers(options.headers) });
  if (response.status === 401) {
    await askKey();
    return call(path, options);
  }
  if (!response.ok) {
    const said = await response.json().catch(() => null);
    throw new Error(said?.error?.message ?? `the server answered ${response.status}`);
  }
  return response;
}

let asking = null;
function askKey() {
  asking ??= new Promise((done) => {
    find("lock").showModal();
    find("lock").addEventListener("close", () => {
      sessionStorage.setItem("key", find("key").value.trim());
      asking = null;
      done();
    }, { once: true });
  });
  return asking;
}

function show(role, text) {
  const item = document.createElement("li");
  item.className = role;
  item.textContent = text;
  find("messages").append(item);
  item.scrollIntoView({ block: "end" });
  return item;
}

function ready() {
  find("send").hidden = Boolean(writing);
  find("stop").hidden = !writing;
  find("again").disabled = Boolean(writing) || messages.at(-1)?.role !== "assistant";
}

async function answer() {
  const item = show("assistant writing", "");
  const stop = writing = new AbortController();
  ready();
  let text = "";
  try {
    const response = await call("v1/chat/completions", {
      method: "POST", signal: stop.signal, headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ messages, stream: true }),
    });
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      text += event.choices[0]?.delta.content ?? "";
      const atEnd = isAtEnd();
      item.textContent = text;
      if (atEnd) item.scrollIntoView({ block: "end" });
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      const problem = show("error", error.message);
      problem.setAttribute("role", "alert");
    }
  } finally {
    item.className = "assistant";
    if (text) messages.push({ role: "assistant", content: text });
    else item.remove();
    if (writing === stop) writing = null;
    ready();
  }
}

function isAtEnd() {
  const list = find("messages");
  return list.scrollHeight - list.scrollTop - list.clientHeight < 40;
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = find("text").value.trim();
  if (!text || writing) return;
  find("text").value = "";
  messages.push({ role: "user", content: text });
  show("user", text);
  answer();
});
find("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    find("ask").requestSubmit();
  }
});
find("stop").addEventListener("click", () => writing?.abort());
find("again").addEventListener("click", () => {
  messages.pop();
  [...document.querySelectorAll("#messages .assistant")].at(-1)?.remove();
  answer();
});
find("clear").addEventListener("click", () => {
  writing?.abort();
  messages.length = 0;
  find("messages").replaceChildren();
  ready();
});

find("image").addEventListener("change", async () => {
  const [file] = find("image").files;
  if (!file) return;
  const reader = new FileReader();
  reader.addEventListener("load", () => {
    find("shown").src = reader.result;
    find("shown").hidden = false;
  });
  reader.readAsDataURL(file);
  const rows = find("classes").tBodies[0];
  rows.replaceChildren();
  find("classes").hidden = false;
  try {
    const response = await call("v1/classify", { method: "POST", body: file });
    for (const { class: index, name, score } of (await response.json()).classes) {
      const row = rows.insertRow();
      row.insertCell().textContent = name ?? `class ${index}`;
      row.insertCell().textContent = `${(100 * score).toFixed(1)}%`;
    }
  } catch (error) {
    rows.insertRow().insertCell().textContent = error.message;
  }
});

function drawStages(found) {
  const now = performance.now();
  const stages = found.stages;
  const items = stages.map((stage, index) => {
    const item = document.createElement("li");
    const last = before?.stages[index];
    const seconds = before ? (now - before.at) / 1000 : 0;
    const same = last?.stage === stage.stage && last.device === stage.device && seconds > 0;
    const busy = same ? Math.min(1, Math.max(0, (stage.busy_s - last.busy_s) / seconds)) : 0;
    const rate = same ? Math.max(0, (stage.microbatches - last.microbatches) / seconds) : 0;
    const head = document.createElement("div");
    head.textContent = `Stage ${stage.stage} on ${stage.device}`;
    const bar = document.createElement("progress");
    bar.value = busy;
    bar.setAttribute("aria-label", "computing");
    const said = document.createElement("div");
    said.className = "faint";
    said.textContent = 
      `${(100 * busy).toFixed(0)}% computing, ${rate.toFixed(1)} microbatches/s, ` +
      `${(stage.memory_bytes / 2 ** 20).toFixed(1)} MiB`;
    item.append(head, bar, said);
    return item;
  });
  find("stages").replaceChildren(...items);
  before = { at: now, stages };
  const changes = found.changes.map((change) => {
    const item = document.createElement("li");
    item.textContent = `${change.why} (${change.took_s} s)`;
    return item;
  });
  find("changes").replaceChildren(...changes);
  const load = [["in slots", `${found.running} of ${found.slots}`], ["waiting", found.waiting]];
  find("load").replaceChildren(...load.flatMap(([name, value]) => {
    const term = document.createElement("dt");
    const said = document.createElement("dd");
    term.textContent = name;
    said.textContent = value;
    return [term, said];
  }));
}

async function look() {
  try {
    const found = await (await call("v1/pipeline")).json();
    find("model").textContent = document.title = found.model;
    find("chat").hidden = found.classifies;
    find("classify").hidden = !found.classifies;
    find("state").textContent = found.problem ?? "ready";
    find("state").className = found.problem ? "bad" : "";
    drawStages(found);
  } catch {
    find("state").textContent = "the server does not answer";
    find("state").className = "bad";
  }
  setTimeout(look, 2000);
}
look();
