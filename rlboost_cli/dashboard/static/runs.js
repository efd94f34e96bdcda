"use strict";
// Brings the list of runs up to date without loading the page anew, which would take the reader's place away.
setInterval(async () => {
  try {
    const answer = await fetch(location.pathname);
    if (!answer.ok) return;
    const found = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
    const shown = document.querySelector("main");
    if (found && found.innerHTML !== shown.innerHTML && !shown.contains(document.activeElement))
      shown.replaceChildren(...found.childNodes);
  } catch {
    // the server is away; the next try may find it
  }
}, 5000);
